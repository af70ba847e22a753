"""What is found out about ranks from outside: hangs, slow ranks, ranks of other launchers."""
