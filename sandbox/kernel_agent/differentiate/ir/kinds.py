"""Which operations are of a kind, for passes that treat a kind alike."""

from __future__ import annotations

from ...source import words

ARITHMETIC = words("add sub mul div")
STRETCHING = words("expand broadcast full")  # one element for several
MOVING = STRETCHING | words("permute reshape")  # elements as they are, elsewhere
LANEWISE = ARITHMETIC | words(
    "neg cast expand broadcast where call fmod maximum minimum"
)  # an element from those in its place
# What a kernel is made of in which each lane minds its own place.
PLAIN = LANEWISE | words("const constexpr param pid npid load compare and or not invert full floordiv mod")
NATURAL = MOVING | words("add mul floordiv mod cdiv minimum")  # never negative where no argument is
MIXING = words(
    "reduce dot scan combine combined fold affine permute reshape argreduce flip join split gather"
)  # an element from other places'
DETACHED = words("compare floordiv mod argreduce pid npid arange isnone")  # no derivative
