"""Problems with answers that can be checked, and their prompt templates; files of questions and answers."""
