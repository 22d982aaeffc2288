"""Every attention call of somebody's program: `tilewise.trace()` and what `tilewise trace` starts."""
