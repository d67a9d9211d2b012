"""Runs of one recipe in several arms, each for the same training time: plan, processes, and the files they leave."""
