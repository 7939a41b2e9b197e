"""From effects back to source.

In: the effects of a backward with their schedule, and the launch they belong to. Out: text.

    demand        what has to be computed, how often it is used, and where
    emit          one kernel
    step_functions  a kernel whose loops walk some steps without masks, and the bodies as functions
    section       the Functions and the stub around the kernels
    chosen_tiles  which tiles those have in a call
    steps         what the host does for each launch of a kernel
    helpers       functions that they call, as text
    line_breaks   long lines of generated source
"""
