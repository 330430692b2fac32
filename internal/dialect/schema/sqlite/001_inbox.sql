-- watermill-inbox, schema 001 (SQLite 3.35 and later).
-- Paste it into your migration tool as it is, or rename the tables and the index.

CREATE TABLE IF NOT EXISTS "watermill_inbox" (
    "consumer"      TEXT NOT NULL COLLATE BINARY,
    "message_id"    TEXT NOT NULL COLLATE BINARY,
    -- Milliseconds since 1970, UTC.
    "processed_at"  INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)),
    PRIMARY KEY ("consumer", "message_id")
) WITHOUT ROWID;

-- Finds what the Cleaner deletes, for each consumer by its own retention.
CREATE INDEX IF NOT EXISTS "watermill_inbox_consumer_processed_at_idx" ON "watermill_inbox" ("consumer", "processed_at");

-- Messages that handlers returned and that are not known to be sent. Most handlers return none.
CREATE TABLE IF NOT EXISTS "watermill_inbox_unsent" (
    "consumer"      TEXT NOT NULL COLLATE BINARY,
    "message_id"    TEXT NOT NULL COLLATE BINARY,
    "claimed_at"    INTEGER NOT NULL,  -- processed_at of the record
    "stored_at"     INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)),
    "leased_until"  INTEGER,           -- a relay is about to publish them
    "topic"         TEXT NOT NULL,
    "produced"      BLOB NOT NULL,
    PRIMARY KEY ("consumer", "message_id", "claimed_at")
);
