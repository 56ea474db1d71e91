"""MetaWorld's tasks behind the project's env interfaces, in processes of an environment of their own."""
