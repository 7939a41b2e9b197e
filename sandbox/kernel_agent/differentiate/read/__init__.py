"""From source to graph.

In: a loaded forward file and the arguments of one call. Out: the launches of the stub, each with the graph of
its kernel.

    trace         one call of the stub: what each launch reads, writes and wants gradients for
    block_sizes   sizes of blocks in place of those that a launch passes
    launchers     launchers that a host function makes itself, under names of the top level
    syntax_check  refuses the statements that no pass understands
    normalise     interprets a kernel over graph nodes: statements, and
      kernel_values   what it is interpreted with, and what is known of values and conditions
      expressions     everything that has a value
      calls           calls, with helpers inlined
      branches        `if`, and what names stand for after it
      loops           `for` and `while`, and their carries
      block_uses      names for the places where a block stands
      last_steps      what the last step of a loop alone does, behind it
      aliases         what is written and read by one buffer
    language      what each function of triton.language means
"""
