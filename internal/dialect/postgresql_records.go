package dialect

import (
	"fmt"
	"strings"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
)

const postgreSQLNow = `(extract(epoch FROM now()) * 1000000)::bigint`

// Consumers implements [Dialect]: it jumps from one consumer to the next in the key's index.
func (PostgreSQL) Consumers(table Table) Query {
	return Query{Text: fmt.Sprintf(`WITH RECURSIVE found AS (`+
		`(SELECT "consumer" FROM %[1]s ORDER BY "consumer" LIMIT 1) UNION ALL `+
		`SELECT (SELECT next."consumer" FROM %[1]s AS next WHERE next."consumer" > found."consumer" ORDER BY next."consumer" LIMIT 1) `+
		`FROM found WHERE found."consumer" IS NOT NULL) `+
		`SELECT "consumer", %[2]s FROM found WHERE "consumer" IS NOT NULL UNION ALL SELECT '', %[2]s`, table.Quoted(), postgreSQLNow)}
}

// CleanerLock implements [Dialect], with a lock of the transaction, so that poolers work.
func (PostgreSQL) CleanerLock(table Table) Query {
	return Query{Text: `SELECT pg_try_advisory_xact_lock(hashtext('watermill-inbox cleaner'), hashtext(` +
		Literal(table.String()) + `))::int`}
}

// DeleteProcessed implements [Dialect]. The array makes it a scan of just these places; a place is
// unique only within its partition.
func (PostgreSQL) DeleteProcessed(table Table, params DeleteProcessedParams) Query {
	return Query{Text: fmt.Sprintf(`WITH expired AS MATERIALIZED (SELECT tableoid AS part, ctid AS place FROM %[1]s `+
		`WHERE "consumer" = %[2]s AND "processed_at" >= %[3]s AND "processed_at" < %[4]s AND ("produced" IS NULL OR "dispatched_at" IS NOT NULL) `+
		`ORDER BY "processed_at" LIMIT %[5]d FOR UPDATE SKIP LOCKED) `+
		`DELETE FROM %[1]s AS record USING expired WHERE record.ctid = ANY (ARRAY(SELECT place FROM expired)) `+
		`AND record.ctid = expired.place AND record.tableoid = expired.part RETURNING `+postgreSQLProcessedAt,
		table.Quoted(), Literal(params.Consumer), postgreSQLTime(params.From), postgreSQLTime(params.Before), params.Limit)}
}

// Count implements [Dialect].
func (PostgreSQL) Count(table Table, selection inbox.Selection) Query {
	return Query{Text: `SELECT count(*) FROM ` + table.Quoted() + ` WHERE ` + postgreSQLSelection(selection)}
}

// Find implements [Dialect].
func (PostgreSQL) Find(table Table, selection inbox.Selection, after inbox.Key, limit int) Query {
	return Query{Text: fmt.Sprintf(`SELECT "consumer", "message_id", %s, CASE WHEN "dispatched_at" IS NULL THEN "produced" END FROM %s `+
		`WHERE %s AND ("consumer", "message_id") > (%s, %s) ORDER BY "consumer", "message_id" LIMIT %d`,
		postgreSQLProcessedAt, table.Quoted(), postgreSQLSelection(selection),
		Literal(after.Consumer), Literal(after.MessageID), limit)}
}

// DeleteRecords implements [Dialect].
func (PostgreSQL) DeleteRecords(table Table, found []inbox.Record) Query {
	return Query{Text: fmt.Sprintf(`DELETE FROM %s WHERE ("consumer", "message_id") IN (%s)`,
		table.Quoted(), lockRecords(table, found, ``))}
}

// Statistics implements [Dialect].
func (PostgreSQL) Statistics(table Table) Query {
	return Query{Text: `SELECT "consumer", count(*), count(*) FILTER (WHERE "produced" IS NOT NULL AND "dispatched_at" IS NULL), ` +
		`(extract(epoch FROM min("processed_at")) * 1000000)::bigint, (extract(epoch FROM max("processed_at")) * 1000000)::bigint, ` +
		`count(*) FILTER (WHERE "processed_at" > now() - interval '24 hours'), 0::bigint FROM ` + table.Quoted() + ` GROUP BY "consumer" ` +
		`UNION ALL SELECT '', 0, 0, 0, 0, 0, coalesce((SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree(` +
		Literal(table.String()) + `)), pg_total_relation_size(` + Literal(table.String()) + `))::bigint ORDER BY 1`}
}

// postgreSQLSelection is a condition; true when all is selected.
func postgreSQLSelection(s inbox.Selection) string {
	conditions := []string{`true`}
	if s.Consumer != "" {
		conditions = append(conditions, `"consumer" = `+Literal(s.Consumer))
	}
	if s.MessageID != "" {
		conditions = append(conditions, `"message_id" = `+Literal(s.MessageID))
	}
	if !s.From.IsZero() {
		conditions = append(conditions, `"processed_at" >= `+postgreSQLTime(s.From))
	}
	if !s.To.IsZero() {
		conditions = append(conditions, `"processed_at" < `+postgreSQLTime(s.To))
	}
	if s.OlderThan != 0 {
		conditions = append(conditions, `"processed_at" < now() - `+interval(s.OlderThan.Microseconds()))
	}
	if s.Unsent {
		conditions = append(conditions, `"produced" IS NOT NULL AND "dispatched_at" IS NULL`)
	}
	return strings.Join(conditions, " AND ")
}

// postgreSQLTime is exact to the microsecond and does not depend on the session's settings.
func postgreSQLTime(at time.Time) string {
	if at.IsZero() {
		return `'-infinity'::timestamptz`
	}
	return `(timestamptz 'epoch' + ` + interval(at.UnixMicro()) + `)`
}
