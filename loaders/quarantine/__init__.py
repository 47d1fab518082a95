"""Bad samples: what a loader skips, the record of it on this machine, and the list that runs share."""
