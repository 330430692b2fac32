package inboxsql

import (
	"fmt"
	"strings"
	"time"

	"github.com/lib/pq"

	inbox "github.com/devmappa/watermill-inbox"
)

const postgreSQLNow = `(extract(epoch FROM now()) * 1000000)::bigint`

// ConsumersQuery implements [SchemaAdapter]: it jumps from one consumer to the next in the key's index.
func (DefaultPostgreSQLSchema) ConsumersQuery(params CheckParams) Query {
	return Query{Query: fmt.Sprintf(`WITH RECURSIVE found AS (`+
		`(SELECT "consumer" FROM %[1]s ORDER BY "consumer" LIMIT 1) UNION ALL `+
		`SELECT (SELECT next."consumer" FROM %[1]s AS next WHERE next."consumer" > found."consumer" ORDER BY next."consumer" LIMIT 1) `+
		`FROM found WHERE found."consumer" IS NOT NULL) `+
		`SELECT "consumer", %[2]s FROM found WHERE "consumer" IS NOT NULL UNION ALL SELECT '', %[2]s`, params.Table.Quoted(), postgreSQLNow)}
}

// CleanerLockQuery implements [SchemaAdapter], with a lock of the transaction, so that poolers work.
func (DefaultPostgreSQLSchema) CleanerLockQuery(params CheckParams) Query {
	return Query{Query: `SELECT pg_try_advisory_xact_lock(hashtext('watermill-inbox cleaner'), hashtext(` +
		pq.QuoteLiteral(params.Table.Quoted()) + `))::int`}
}

// DeleteProcessedQuery implements [SchemaAdapter]. The array makes it a scan of just these places; a place is
// unique only within its partition.
func (DefaultPostgreSQLSchema) DeleteProcessedQuery(params DeleteProcessedParams) Query {
	return Query{Query: fmt.Sprintf(`WITH expired AS MATERIALIZED (SELECT tableoid AS part, ctid AS place FROM %[1]s `+
		`WHERE "consumer" = %[2]s AND "processed_at" >= %[3]s AND "processed_at" < %[4]s AND ("produced" IS NULL OR "dispatched_at" IS NOT NULL) `+
		`ORDER BY "processed_at" LIMIT %[5]d FOR UPDATE SKIP LOCKED) `+
		`DELETE FROM %[1]s AS record USING expired WHERE record.ctid = ANY (ARRAY(SELECT place FROM expired)) `+
		`AND record.ctid = expired.place AND record.tableoid = expired.part RETURNING `+postgreSQLProcessedAt,
		params.Table.Quoted(), pq.QuoteLiteral(params.Consumer), postgreSQLTime(params.From), postgreSQLTime(params.Before), params.Limit)}
}

// CountQuery implements [SchemaAdapter].
func (DefaultPostgreSQLSchema) CountQuery(params CountParams) Query {
	return Query{Query: `SELECT count(*) FROM ` + params.Table.Quoted() + ` WHERE ` + postgreSQLSelection(params.Selection)}
}

// FindQuery implements [SchemaAdapter].
func (DefaultPostgreSQLSchema) FindQuery(params FindParams) Query {
	return Query{Query: fmt.Sprintf(`SELECT "consumer", "message_id", %s, CASE WHEN "dispatched_at" IS NULL THEN "produced" END FROM %s `+
		`WHERE %s AND ("consumer", "message_id") > (%s, %s) ORDER BY "consumer", "message_id" LIMIT %d`,
		postgreSQLProcessedAt, params.Table.Quoted(), postgreSQLSelection(params.Selection),
		pq.QuoteLiteral(params.After.Consumer), pq.QuoteLiteral(params.After.MessageID), params.Limit)}
}

// DeleteRecordsQuery implements [SchemaAdapter].
func (DefaultPostgreSQLSchema) DeleteRecordsQuery(params DeleteRecordsParams) Query {
	return Query{Query: fmt.Sprintf(`DELETE FROM %s WHERE ("consumer", "message_id") IN (%s)`,
		params.Table.Quoted(), lockRecords(params.Table, params.Found, ``))}
}

// StatisticsQuery implements [SchemaAdapter].
func (DefaultPostgreSQLSchema) StatisticsQuery(params CheckParams) Query {
	table := params.Table.Quoted()
	return Query{Query: `SELECT "consumer", count(*), count(*) FILTER (WHERE "produced" IS NOT NULL AND "dispatched_at" IS NULL), ` +
		`(extract(epoch FROM min("processed_at")) * 1000000)::bigint, (extract(epoch FROM max("processed_at")) * 1000000)::bigint, ` +
		`count(*) FILTER (WHERE "processed_at" > now() - interval '24 hours'), 0::bigint FROM ` + table + ` GROUP BY "consumer" ` +
		`UNION ALL SELECT '', 0, 0, 0, 0, 0, coalesce((SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree(` +
		pq.QuoteLiteral(table) + `)), pg_total_relation_size(` + pq.QuoteLiteral(table) + `))::bigint ORDER BY 1`}
}

// postgreSQLSelection is a condition; true when all is selected.
func postgreSQLSelection(s inbox.Selection) string {
	conditions := []string{`true`}
	if s.Consumer != "" {
		conditions = append(conditions, `"consumer" = `+pq.QuoteLiteral(s.Consumer))
	}
	if s.MessageID != "" {
		conditions = append(conditions, `"message_id" = `+pq.QuoteLiteral(s.MessageID))
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
