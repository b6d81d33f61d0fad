"""Images of chats: loading them, and what the model's processor makes of them."""
