"""The frozen-probe experiment: methods × seeds on a frozen model, written to a run folder."""
