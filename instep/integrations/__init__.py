"""What lets programs of other projects work with instep unmodified; each is a module or a folder here."""
