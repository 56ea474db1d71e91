"""HTML reports of one run or several, and summaries over seeds."""
