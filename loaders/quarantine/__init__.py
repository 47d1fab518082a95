"""Bad samples: which ones a loader skips, their record on this machine, and the list that several runs share."""
