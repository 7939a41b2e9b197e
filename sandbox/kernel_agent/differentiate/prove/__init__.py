"""Proofs about addresses and values of a kernel. Nothing is changed here.

In: nodes of a graph, such as the offset and the mask of a write. Out: a proof or a count, or the reason why
there is none.

    affine     addresses as sums of coefficient times variable, and which of them are injective
    masks      the conditions that a mask is made of
    disjoint   no two programs, iterations or lanes reach one address
    cover      how many elements a write reaches
    overwrite  the forward's own stores do not meet
    stored_rows  rows that data tells, and that the stores of an output keep apart
    positions  which positions of lanes and programs, and digits of them, an address adds up
    blocks     which values hang on no block size
    beyond     whether rows that do not exist are alike
    bounds     the programs of the forward that reach one tile
"""
