"""Proof that laws can fail: every known defect, and its benign twin, before the laws that must catch it.

`case_judge` judges cases without pytest, `trials` tries one defect, `kill_matrix` tries the catalogue and shows
the result. Start reading at `trials`.

May import everything but `conformance.cli`; needs torch, so that only the command `defects` imports it.
"""
