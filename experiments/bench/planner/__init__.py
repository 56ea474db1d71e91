"""The plans that the search finds, against every plan of small random cases."""
