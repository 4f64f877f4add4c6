"""The scripts are run by tests; a module of theirs that is collected would change the process."""

collect_ignore = ["scripts"]
