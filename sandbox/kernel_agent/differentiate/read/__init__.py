"""From source to graph.

In: a loaded forward file and the arguments of one call. Out: the launches of the stub, each with the graph of
its kernel.

    trace         one call of the stub: what each launch reads, writes and wants gradients for
    syntax_check  refuses the statements that no pass understands
    normalise     interprets a kernel over graph nodes
    language      what each function of triton.language means
"""
