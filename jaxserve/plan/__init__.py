"""Compares mesh layouts by compiling the real step for chips that need not be here, and predicts what each would do."""
