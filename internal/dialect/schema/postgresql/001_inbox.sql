-- watermill-inbox, schema 001 (PostgreSQL 12 and later).
-- Paste it into your migration tool as it is, or rename the tables and the index.
--
-- The names are compared byte by byte, hence the collation. There is no sequence, trigger or foreign
-- key here on purpose: every one of them would be work, or a way to fail, on the path of each message.

CREATE TABLE IF NOT EXISTS "watermill_inbox" (
    "consumer"      TEXT COLLATE "C" NOT NULL,
    "message_id"    TEXT COLLATE "C" NOT NULL,
    "processed_at"  TIMESTAMPTZ NOT NULL DEFAULT now(),
    PRIMARY KEY ("consumer", "message_id")
);

-- Finds what the Cleaner deletes, for each consumer by its own retention.
CREATE INDEX IF NOT EXISTS "watermill_inbox_consumer_processed_at_idx" ON "watermill_inbox" ("consumer", "processed_at");

-- Messages that handlers returned and that are not known to be sent. Most handlers return none.
CREATE TABLE IF NOT EXISTS "watermill_inbox_unsent" (
    "consumer"      TEXT COLLATE "C" NOT NULL,
    "message_id"    TEXT COLLATE "C" NOT NULL,
    "claimed_at"    TIMESTAMPTZ NOT NULL,  -- processed_at of the record
    "stored_at"     TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
    "leased_until"  TIMESTAMPTZ,           -- a relay is about to publish them
    "topic"         TEXT NOT NULL,
    "produced"      BYTEA NOT NULL,
    PRIMARY KEY ("consumer", "message_id", "claimed_at")
);

-- The least that a consumer needs, and a Cleaner under a role of its own:
--   GRANT SELECT, INSERT ON "watermill_inbox" TO your_consumer_role;
--   GRANT SELECT, INSERT, UPDATE, DELETE ON "watermill_inbox_unsent" TO your_consumer_role;
--   GRANT SELECT, UPDATE, DELETE ON "watermill_inbox", "watermill_inbox_unsent" TO your_cleaner_role;
