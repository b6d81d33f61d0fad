"""What programs do alike for themselves, such as reading flags; nothing that another program sees on a connection."""
