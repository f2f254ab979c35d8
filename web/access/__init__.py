"""Access control: API keys, allowed hosts, and limits on concurrent use."""
