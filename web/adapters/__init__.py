"""Other shapes of the same conversations: bodies become chats, and chats' answers become theirs."""
