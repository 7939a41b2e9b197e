"""What every pass of the differentiator works on: a kernel as a graph of values placed in loops and branches.

In: nothing of the other groups. Out: the graph, and what is needed to make, change and name its values.

    nodes           values, regions and effects; how to walk them
    graph           makes values: types, shapes, sharing, the region that a value belongs to
    folding         what an operation gives for numbers
    simplify        algebra at construction
    kinds           which operations passes treat alike
    values          what the interpretation of a kernel has besides nodes; the kernel as a whole
    nonnegative     which integers are never negative
    rewriter        a part of the graph again, with some values replaced
    transplant      a whole sweep again, in a new loop
    address_tables  pointers that are read from a table of addresses
    names, spelling how values are called, and how operations are written
    report, refusal what is said about a line; what cannot be differentiated
"""
