"""From the graph of a forward to the effects of its backward, without a schedule.

In: a kernel's graph. Out: gradient writes in loops and branches, every one of them atomic, and where forward
values come from.

    normalised       sums that each step divides are divided after the loop
    running_maxima   maxima that cancel are taken out of the forward
    sweep            the reverse sweep, last effect first
    rules            the adjoint of every operation
    winners          what a loop chooses, where a number tells the step that it is from
    wrapped_indices  indices that wrap around are written unwrapped
    forward_values   values of the forward in reverse loops: loaded, computed again, or taped
    kept_numbers     what a reverse loop needs of a carried block, where that is a few numbers
    checkpoints      a tape in the memory of two short ones
    written_once     carries of which each step writes lanes of its own: what they end with will do
"""
