"""Which stored tokens a query may attend to, within a budget. What is chosen is made of whole blocks."""
