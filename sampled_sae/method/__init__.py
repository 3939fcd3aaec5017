"""The method of the paper: scores, candidate pools, schedules, selection."""
