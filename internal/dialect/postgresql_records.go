package dialect

import (
	"fmt"
	"strings"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
)

const postgreSQLNow = `(extract(epoch FROM now()) * 1000000)::bigint`

// Consumers implements [Dialect]: it jumps from one consumer to the next in the keys' indexes.
func (PostgreSQL) Consumers(table Table) Query {
	const jump = `SELECT "consumer" FROM (WITH RECURSIVE found AS (` +
		`(SELECT "consumer" FROM %[1]s ORDER BY "consumer" LIMIT 1) UNION ALL ` +
		`SELECT (SELECT next."consumer" FROM %[1]s AS next WHERE next."consumer" > found."consumer" ORDER BY next."consumer" LIMIT 1) ` +
		`FROM found WHERE found."consumer" IS NOT NULL) SELECT "consumer" FROM found WHERE "consumer" IS NOT NULL) AS %[2]s`
	return Query{Text: `SELECT "consumer", ` + postgreSQLNow + ` FROM (` +
		fmt.Sprintf(jump, table.Quoted(), "records") + ` UNION ` + fmt.Sprintf(jump, table.Unsent().Quoted(), "unsent") +
		`) AS consumers UNION ALL SELECT '', ` + postgreSQLNow + ` ORDER BY 1`}
}

// CleanerLock implements [Dialect], with a lock of the transaction, so that poolers work.
func (PostgreSQL) CleanerLock(table Table) Query {
	return Query{Text: `SELECT pg_try_advisory_xact_lock(hashtext('watermill-inbox cleaner'), hashtext(` +
		Literal(table.String()) + `))::int`}
}

// DeleteProcessed implements [Dialect]. The array makes it a scan of just these places; a place is
// unique only within its partition.
func (PostgreSQL) DeleteProcessed(table Table, params inbox.DeleteProcessedParams) Query {
	return Query{Text: fmt.Sprintf(`WITH expired AS MATERIALIZED (SELECT tableoid AS part, ctid AS place FROM %[1]s `+
		`WHERE %[2]s ORDER BY "processed_at" LIMIT %[3]d FOR UPDATE SKIP LOCKED) `+
		`DELETE FROM %[1]s AS record USING expired WHERE record.ctid = ANY (ARRAY(SELECT place FROM expired)) `+
		`AND record.ctid = expired.place AND record.tableoid = expired.part RETURNING `+microseconds(`record."processed_at"`),
		table.Quoted(), expired(params), params.Limit)}
}

func expired(params inbox.DeleteProcessedParams) string {
	return fmt.Sprintf(`"consumer" = %s AND "processed_at" >= %s AND "processed_at" < %s`,
		Literal(params.Consumer), postgreSQLTime(params.From), postgreSQLTime(params.Before))
}

// Undeleted implements [Dialect]. A policy for DELETE, a trigger or a rule keeps records that can be locked; a policy for
// UPDATE keeps even the lock away, and then xmax says that nobody has ever taken one.
func (PostgreSQL) Undeleted(table Table, params inbox.DeleteProcessedParams) Query {
	return Query{Text: fmt.Sprintf(`SELECT (SELECT count(*) FROM (SELECT FROM %[1]s WHERE %[2]s LIMIT 1 FOR UPDATE SKIP LOCKED) AS free)::int + `+
		`EXISTS (SELECT FROM %[1]s WHERE %[2]s AND "xmax" = '0')::int`, table.Quoted(), expired(params))}
}

// Count implements [Dialect].
func (PostgreSQL) Count(table Table, selection inbox.Selection) Query {
	if selection.Unsent {
		return Query{Text: `SELECT count(*) FROM ` + table.Unsent().Quoted() + ` AS unsent WHERE ` + unsentSelection(selection)}
	}
	return Query{Text: `SELECT count(*) FROM ` + table.Quoted() + ` AS record WHERE ` + recordSelection(selection)}
}

// Find implements [Dialect].
func (PostgreSQL) Find(table Table, selection inbox.Selection, after inbox.Record, limit int) Query {
	if selection.Unsent {
		return Query{Text: `SELECT unsent."consumer", unsent."message_id", ` + microseconds(`unsent."claimed_at"`) + `, ` + unsentColumns +
			` FROM ` + table.Unsent().Quoted() + ` AS unsent WHERE ` + unsentSelection(selection) + unsentAfter(after, limit)}
	}
	return Query{Text: `SELECT record."consumer", record."message_id", ` + microseconds(`record."processed_at"`) + `, ` + unsentColumns +
		` FROM ` + recordsWithUnsent(table) + ` WHERE ` + recordSelection(selection) +
		fmt.Sprintf(` AND (record."consumer", record."message_id") > (%s, %s) ORDER BY record."consumer", record."message_id" LIMIT %d`,
			Literal(after.Key.Consumer), Literal(after.Key.MessageID), limit)}
}

// unsentAfter is the end of a query for a page of unsent messages.
func unsentAfter(after inbox.Record, limit int) string {
	return fmt.Sprintf(` AND (unsent."consumer", unsent."message_id", unsent."claimed_at") > (%s, %s, %s) `+
		`ORDER BY unsent."consumer", unsent."message_id", unsent."claimed_at" LIMIT %d`,
		Literal(after.Key.Consumer), Literal(after.Key.MessageID), postgreSQLTime(after.ProcessedAt), limit)
}

// LeaseUnsent implements [Dialect].
func (PostgreSQL) LeaseUnsent(table Table, selection inbox.Selection, after inbox.Record, limit int, lease time.Duration) Query {
	unsent := table.Unsent().Quoted()
	return Query{Text: `WITH mine AS MATERIALIZED (SELECT unsent.ctid AS place FROM ` + unsent + ` AS unsent WHERE ` + unsentSelection(selection) +
		` AND (unsent."leased_until" IS NULL OR unsent."leased_until" <= clock_timestamp())` + unsentAfter(after, limit) + ` FOR UPDATE SKIP LOCKED) ` +
		`UPDATE ` + unsent + ` AS unsent SET "leased_until" = clock_timestamp() + ` + interval(lease.Microseconds()) +
		` WHERE unsent.ctid = ANY (ARRAY(SELECT place FROM mine)) ` +
		`RETURNING unsent."consumer", unsent."message_id", ` + microseconds(`unsent."claimed_at"`) + `, ` + unsentColumns}
}

// DeleteRecords implements [Dialect]. The sub-select locks in the order of the keys; a DELETE alone locks in the order
// of its plan. Nothing is added to processed_at on the other side of the comparison, so that the records are looked up by
// their keys, not by their ages, of which many may be equal.
func (PostgreSQL) DeleteRecords(table Table, found []inbox.Record) Query {
	return Query{Text: `DELETE FROM ` + table.Quoted() + ` WHERE ("consumer", "message_id") IN (` +
		`SELECT record."consumer", record."message_id" FROM ` + table.Quoted() + ` AS record ` +
		`JOIN (VALUES ` + recordLiterals(found) + `) AS found ("consumer", "message_id", "processed_at") ` +
		`ON record."consumer" = found."consumer" AND record."message_id" = found."message_id" ` +
		`AND record."processed_at" + interval '0' = found."processed_at" ` +
		`ORDER BY record."consumer", record."message_id" FOR UPDATE OF record)`}
}

// DeleteUnsent implements [Dialect].
func (PostgreSQL) DeleteUnsent(table Table, found []inbox.Record) Query {
	return Query{Text: `WITH ` + wantedUnsent(table, found, ``) + ` DELETE FROM ` + table.Unsent().Quoted() +
		` AS unsent WHERE unsent.ctid = ANY (ARRAY(SELECT place FROM mine))`}
}

// Statistics implements [Dialect].
func (PostgreSQL) Statistics(table Table) Query {
	size := func(name Table) string {
		literal := Literal(name.String())
		return `coalesce((SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree(` + literal + `)), pg_total_relation_size(` + literal + `))`
	}
	return Query{Text: `SELECT "consumer", sum("records")::bigint, sum("unsent")::bigint, ` +
		`coalesce(` + microseconds(`min("oldest")`) + `, 0), coalesce(` + microseconds(`max("newest")`) + `, 0), sum("last_day")::bigint, 0::bigint FROM (` +
		`SELECT "consumer", count(*) AS "records", 0 AS "unsent", min("processed_at") AS "oldest", max("processed_at") AS "newest", ` +
		`count(*) FILTER (WHERE "processed_at" > now() - interval '24 hours') AS "last_day" FROM ` + table.Quoted() + ` GROUP BY "consumer" UNION ALL ` +
		`SELECT "consumer", 0, count(*), NULL, NULL, 0 FROM ` + table.Unsent().Quoted() + ` GROUP BY "consumer") AS part GROUP BY "consumer" ` +
		`UNION ALL SELECT '', 0, 0, 0, 0, 0, (` + size(table) + ` + ` + size(table.Unsent()) + `)::bigint ORDER BY 1`}
}

func recordSelection(s inbox.Selection) string {
	return postgreSQLSelection(s, `record.`, `record."processed_at"`)
}

func unsentSelection(s inbox.Selection) string {
	return postgreSQLSelection(s, `unsent.`, `unsent."stored_at"`)
}

// postgreSQLSelection is a condition; true when all is selected.
func postgreSQLSelection(s inbox.Selection, table, at string) string {
	conditions := []string{`true`}
	if s.Consumer != "" {
		conditions = append(conditions, table+`"consumer" = `+Literal(s.Consumer))
	}
	if s.MessageID != "" {
		conditions = append(conditions, table+`"message_id" = `+Literal(s.MessageID))
	}
	if !s.From.IsZero() {
		conditions = append(conditions, at+` >= `+postgreSQLTime(s.From))
	}
	if !s.To.IsZero() {
		conditions = append(conditions, at+` < `+postgreSQLTime(s.To))
	}
	if s.OlderThan != 0 {
		conditions = append(conditions, at+` < now() - `+interval(s.OlderThan.Microseconds()))
	}
	if s.NotOlderThan != 0 {
		conditions = append(conditions, at+` >= now() - `+interval(s.NotOlderThan.Microseconds()))
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
