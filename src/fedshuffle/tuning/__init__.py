"""Step sizes that suit a run: the search for them."""
