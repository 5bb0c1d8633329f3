"""BERT-family encoders: loading, export, and length bucketing."""
