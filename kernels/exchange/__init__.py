"""Exchange between the GPUs of one host over peer memory: sums over ranks, with the norm behind them, and gathering."""
