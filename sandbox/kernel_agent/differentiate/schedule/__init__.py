"""Who writes which gradient.

In: the effects of a backward, every write atomic. Out: the same gradients with a schedule: stores where they
are proven, kernels of their own in which one program owns a tile, private partial sums; atomic adds are what
is left.

    gradient_writes  merges writes to one address, makes stores of those that are proven disjoint, fills what
                     branches skip
    partials         a few programs walk the summed axis and keep the sums in registers
    swapped_lanes    writes to neighbouring lanes go to the lanes themselves
    owner            a kernel in which one program owns each tile
    nests            its loops, and values of the forward in them
    programs         the programs of the forward as variables of such a kernel
    tile_queues      tiles that programs walk in turn, as tiles that anyone may own
    windows          scattered windows are gathered instead
    tap_steps        with a stride, the taps that reach an element alone
    reindex          values at other positions than their lanes stand at
    kept_values      values that took a loop are stored by the main kernel
    kept_tiles       where in a matrix whole tiles of them are stored
    operands         tiles that products take more than loaded, computed once in front of an owner kernel
    saved_numbers    numbers of steps that the forward tapes, so that no loop runs again for them
    saved_tiles      tiles that the forward saves, so that no product is computed again
    step_matrices    tiles of an adjoint that products of several gradients take, stored once as a matrix
    product_tiles    tiles of their own for kernels that own products of such a matrix
    step_rows        what steps of a loop add to rows of a gradient is a product behind it
    sunk_sums        what is linear in a product of each step, done to their sum behind the loop
    row_factors      what products of blocks are multiplied with, row by row, behind them
    row_exponents    the same in the exponents of a softmax's weights, as log-sum-exp
    turned_tiles     tiles that products take transposed, formed so
    shared_loops     programs that would be few share a loop out
    second_launch    what is added to a gradient that is stored
    decisions        what the kernel says of all this, and what an expert would try
    own_blocks       blocks of the backward's own, where nothing hangs on the forward's
    own_tiles        the same for tiles of an output that has two axes of them
    aligned_rows     which strides tell whether rows are aligned, as large tiles want them to be
    exact_products   those of float32, as three in TF32 each
    block_axes       names for a block's uses, where it is that of several axes
    own_lanes        the same for blocks of lanes that have nothing to do with each other
    whole_steps      in which steps of a loop all lanes of a tile lie inside
    split_loops      loops of products that walk those without masks
    step_tiles       loops over single steps of a recurrence, in tiles of steps
    linear_carries   what such a loop carries, as a factor and an addend, or a sum
    lifted_steps     values and stores of a step, with a leading axis of steps
    handed_on        gradients that are another tensor: nobody writes them
    scattered        sums at few places are cleared and rounded alone
    runs             sums for what a table tells, of entries that name the same
    tuning           what a tuner may vary
"""
