"""What the runs of a comparison say: statistics, tables and plots."""
