"""The 66 Unicode noncharacters: valid in a string, never used in text interchange."""

NONCHARACTERS = "".join(map(chr, range(0xFDD0, 0xFDF0))) + "".join(
    chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF)
)
