"""Every attention call of a program: `tilewise.trace()` and what `tilewise trace` starts."""
