"""Problems with answers that can be checked, and their text forms; files of questions and answers."""
