"""The 66 noncharacters of Unicode: valid in a string, never part of an interchanged text."""

NONCHARACTERS = "".join(map(chr, range(0xFDD0, 0xFDF0))) + "".join(
    chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF)
)
