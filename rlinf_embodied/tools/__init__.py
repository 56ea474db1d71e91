"""Commands for people who plan, measure and test; nothing else imports them."""
