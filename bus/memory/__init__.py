"""The bus within one process: the same contract and the same tests as over Redis."""
