package main

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/google/uuid"
)

// idOrder is a way to make message ids. In SQL: of the row n that was processed at the time t.
type idOrder struct {
	name string
	next func() string
	sql  string
}

var (
	randomIDs  = idOrder{"random ids, UUIDv4", watermill.NewUUID, `gen_random_uuid()::text`}
	orderedIDs = idOrder{"ordered ids, UUIDv7", newUUIDv7, `overlay(overlay(gen_random_uuid()::text
		PLACING regexp_replace(lpad(to_hex((extract(epoch FROM t) * 1000)::bigint), 12, '0'), '(.{8})', '\1-') FROM 1 FOR 13)
		PLACING '7' FROM 15 FOR 1)`}
)

func newUUIDv7() string { return uuid.Must(uuid.NewV7()).String() }

// prefill puts records into the inbox in the order in which messages would have come, one per
// millisecond up to now, and leaves nothing for the autovacuum to do in the middle of a measurement.
func (p *place) prefill(ctx context.Context, admin *sql.DB, ids idOrder, rows int) error {
	_, err := admin.ExecContext(ctx, fmt.Sprintf(`INSERT INTO %q.watermill_inbox (consumer, message_id, processed_at)
		SELECT '%s', %s, t FROM generate_series(%d, 1, -1) AS n, LATERAL (SELECT now() - n * interval '1 millisecond' AS t) AS at`,
		p.schema, consumerName, ids.sql, rows))
	if err != nil {
		return err
	}
	p.prefilled.Add(int64(rows))
	_, err = admin.ExecContext(ctx, fmt.Sprintf(`VACUUM (FREEZE, ANALYZE) %q.watermill_inbox`, p.schema))
	return err
}
