"""Reasons of the rows that are not right, by name."""

WHY: dict[str, str] = {
    "graph_muon": "`memory-of-steps` on dp2 in fp32: a step leaves 152 bytes, and 64 are allowed; cause not known",
    "multitask": "no law sees the fault `full-weights-kept`, so that it counts as blind; cause not known",
}
