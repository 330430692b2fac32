-- watermill-inbox, schema 001 (SQLite 3.35 and later).
-- Paste it into your migration tool as it is, or rename the table and its index.

CREATE TABLE IF NOT EXISTS "watermill_inbox" (
    "consumer"      TEXT NOT NULL COLLATE BINARY,
    "message_id"    TEXT NOT NULL COLLATE BINARY,
    -- Milliseconds since 1970, UTC.
    "processed_at"  INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)),
    "produced"      BLOB,     -- messages that the handler returned; most handlers return none
    "dispatched_at" INTEGER,  -- when they were known to be sent, as processed_at
    PRIMARY KEY ("consumer", "message_id")
) WITHOUT ROWID;

-- Finds what the Cleaner deletes, for each consumer by its own retention.
CREATE INDEX IF NOT EXISTS "watermill_inbox_consumer_processed_at_idx" ON "watermill_inbox" ("consumer", "processed_at");
