"""What the applications meet outside: files of strangers, folders with two writers, terminals that break."""
