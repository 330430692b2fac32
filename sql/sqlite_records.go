package inboxsql

import (
	"math"
	"strings"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
)

// ConsumersQuery implements [SchemaAdapter]: it jumps from one consumer to the next in the key's index.
func (DefaultSQLiteSchema) ConsumersQuery(params CheckParams) Query {
	table := params.Table.Quoted()
	return Query{Query: `WITH RECURSIVE found ("consumer") AS (SELECT min(` + sqliteConsumer + `) FROM ` + table + ` UNION ALL ` +
		`SELECT (SELECT min(next.` + sqliteConsumer + `) FROM ` + table + ` AS next WHERE next.` + sqliteConsumer + ` > found."consumer") ` +
		`FROM found WHERE found."consumer" IS NOT NULL) ` +
		`SELECT "consumer", ` + sqliteNow + ` * 1000 FROM found WHERE "consumer" IS NOT NULL UNION ALL SELECT '', ` + sqliteNow + ` * 1000`}
}

// CleanerLockQuery implements [SchemaAdapter]: there is one writer anyway.
func (DefaultSQLiteSchema) CleanerLockQuery(CheckParams) Query { return Query{} }

// DeleteProcessedQuery implements [SchemaAdapter]. The condition stands there twice, for columns whose own collation
// finds more keys than were chosen; the second time it must not choose the index, hence the plus.
func (DefaultSQLiteSchema) DeleteProcessedQuery(params DeleteProcessedParams) Query {
	const (
		sent         = ` AND ("produced" IS NULL OR "dispatched_at" IS NOT NULL)`
		expired      = sqliteConsumer + ` = ? AND "processed_at" >= ? AND "processed_at" < ?` + sent
		stillExpired = `+` + sqliteConsumer + ` = ? AND +"processed_at" < ?` + sent
	)
	from, before := int64(math.MinInt64), ceilMillisecond(params.Before)
	if !params.From.IsZero() {
		from = params.From.UnixMilli()
	}
	return Query{`DELETE FROM ` + params.Table.Quoted() + ` WHERE ("consumer", "message_id") IN (` +
		`SELECT "consumer", "message_id" FROM ` + params.Table.Quoted() + ` WHERE ` + expired + ` ORDER BY "processed_at" LIMIT ?) AND ` + stillExpired +
		` RETURNING "processed_at" * 1000`,
		[]any{params.Consumer, from, before, params.Limit, params.Consumer, before}}
}

// CountQuery implements [SchemaAdapter].
func (DefaultSQLiteSchema) CountQuery(params CountParams) Query {
	condition, args := sqliteSelection(params.Selection)
	return Query{`SELECT count(*) FROM ` + params.Table.Quoted() + ` WHERE ` + condition, args}
}

// FindQuery implements [SchemaAdapter].
func (DefaultSQLiteSchema) FindQuery(params FindParams) Query {
	condition, args := sqliteSelection(params.Selection)
	return Query{`SELECT "consumer", "message_id", "processed_at" * 1000, CASE WHEN "dispatched_at" IS NULL THEN "produced" END FROM ` +
		params.Table.Quoted() + ` WHERE ` + condition + ` AND (` + sqliteKey + `) > (?, ?) ORDER BY ` + sqliteKey + ` LIMIT ?`,
		append(args, params.After.Consumer, params.After.MessageID, params.Limit)}
}

// DeleteRecordsQuery implements [SchemaAdapter].
func (DefaultSQLiteSchema) DeleteRecordsQuery(params DeleteRecordsParams) Query {
	chosen, args := sqliteFound(params.Found)
	return Query{chosen + ` DELETE FROM ` + params.Table.Quoted() + ` WHERE ` + sqliteChosen, args}
}

// StatisticsQuery implements [SchemaAdapter]. SQLite does not tell the size of a table, unless it is built for it.
func (DefaultSQLiteSchema) StatisticsQuery(params CheckParams) Query {
	return Query{Query: `SELECT "consumer", count(*), sum("produced" IS NOT NULL AND "dispatched_at" IS NULL), ` +
		`min("processed_at") * 1000, max("processed_at") * 1000, sum("processed_at" > ` + sqliteNow + ` - 86400000), 0 FROM ` +
		params.Table.Quoted() + ` GROUP BY ` + sqliteConsumer + ` UNION ALL SELECT '', 0, 0, 0, 0, 0, 0 ORDER BY 1 COLLATE BINARY`}
}

// sqliteSelection is a condition; true when all is selected.
func sqliteSelection(s inbox.Selection) (condition string, args []any) {
	conditions := []string{`true`}
	add := func(condition string, arg any) {
		conditions, args = append(conditions, condition), append(args, arg)
	}
	if s.Consumer != "" {
		add(sqliteConsumer+` = ?`, s.Consumer)
	}
	if s.MessageID != "" {
		add(sqliteMessageID+` = ?`, s.MessageID)
	}
	if !s.From.IsZero() {
		add(`"processed_at" >= ?`, ceilMillisecond(s.From))
	}
	if !s.To.IsZero() {
		add(`"processed_at" < ?`, ceilMillisecond(s.To))
	}
	if s.OlderThan != 0 {
		add(`"processed_at" < `+sqliteNow+` - ?`, s.OlderThan.Milliseconds())
	}
	if s.Unsent {
		conditions = append(conditions, `"produced" IS NOT NULL AND "dispatched_at" IS NULL`)
	}
	return strings.Join(conditions, " AND "), args
}

// ceilMillisecond makes bounds of finer times right for records that are exact to the millisecond.
func ceilMillisecond(at time.Time) int64 {
	milliseconds := at.UnixMilli()
	if at.After(time.UnixMilli(milliseconds)) {
		milliseconds++
	}
	return milliseconds
}
