"""The bus within one process, under the same contract and tests as the bus over Redis."""
