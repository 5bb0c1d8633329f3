"""Tree ensembles: reading, checking and running Treelite checkpoints."""
