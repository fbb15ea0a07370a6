"""Secrets as they stand in texts."""

from __future__ import annotations

KEY = "-----BEGIN " + "PRIVATE KEY-----"
SECRETS = {
    "aws": "AKIA" + "IOSFODNN7EXAMPLE",
    "aws secret": "aws_secret_access_key = " + "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY",
    "github": "ghp_" + "a1B2" * 9,
    "hub": "hf_" + "abcdEFGH" * 4,
    "api key": "sk-proj-" + "Ab12" * 10,
    "private key": KEY,
    "bearer": "Authorization: Bearer " + "abcdef0123456789abcdef",
    "jwt": "eyJ" + "hbGciOiJIUzI1NiJ9.eyJ" + "zdWIiOiIxMjM0NTY3ODkwIn0.x",
    "url": "s3://user:" + "hunter22@bucket/x",
    "signed url": "https://b.s3.amazonaws.com/x?X-Amz-Signature=" + "0f" * 32,
    "password": "password=" + "correct-horse",
    "prompt": "<|im_start|>user\nWhat is my salary?",
}
