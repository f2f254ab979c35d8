"""The bus within one process, under the same contract and with the same tests as over Redis."""
