"""The Environment protocol and its adapters: what is asked, what an answer is worth, how an answer looks. No torch."""
