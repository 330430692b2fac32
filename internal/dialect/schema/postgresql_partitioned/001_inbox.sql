-- watermill-inbox, schema 001, partitioned by time-ordered message ids (PostgreSQL 14 and later).
-- Paste it into your migration tool as it is, or rename the tables and the index.
--
-- The key is the same as the plain table's and stays unique over all partitions, because the partition
-- is a function of the message id alone. The names are compared byte by byte, hence the collation: only
-- so are ids in the order of their times.
--
-- Partitions are made and retired by package partitions. There must be no DEFAULT partition: with one,
-- a message that is too old would be taken for a new one. It also makes DETACH CONCURRENTLY impossible.

CREATE TABLE IF NOT EXISTS "watermill_inbox" (
    "consumer"      TEXT COLLATE "C" NOT NULL,
    "message_id"    TEXT COLLATE "C" NOT NULL,
    "processed_at"  TIMESTAMPTZ NOT NULL DEFAULT now(),
    PRIMARY KEY ("consumer", "message_id")
) PARTITION BY RANGE ("message_id");

-- Finds records by age.
CREATE INDEX IF NOT EXISTS "watermill_inbox_consumer_processed_at_idx" ON "watermill_inbox" ("consumer", "processed_at");

-- Messages that handlers returned and that are not known to be sent. Most handlers return none. They outlive the
-- partition of their record.
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

-- The least that a consumer needs; its partitions need no grants of their own:
--   GRANT SELECT, INSERT ON "watermill_inbox" TO your_consumer_role;
--   GRANT SELECT, INSERT, UPDATE, DELETE ON "watermill_inbox_unsent" TO your_consumer_role;
-- Package partitions must run as the table's owner, or as a member of the role that owns it, with the right to
-- create tables in the schema.
