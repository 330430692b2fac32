package dialect

import (
	"math"
	"strings"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
)

// Consumers implements [Dialect]: it jumps from one consumer to the next in the key's index.
func (SQLite) Consumers(table Table) Query {
	name := table.Quoted()
	return Query{Text: `WITH RECURSIVE found ("consumer") AS (SELECT min(` + sqliteConsumer + `) FROM ` + name + ` UNION ALL ` +
		`SELECT (SELECT min(next.` + sqliteConsumer + `) FROM ` + name + ` AS next WHERE next.` + sqliteConsumer + ` > found."consumer") ` +
		`FROM found WHERE found."consumer" IS NOT NULL) ` +
		`SELECT "consumer", ` + sqliteNow + ` * 1000 FROM found WHERE "consumer" IS NOT NULL UNION ALL SELECT '', ` + sqliteNow + ` * 1000`}
}

// CleanerLock implements [Dialect]: there is one writer anyway.
func (SQLite) CleanerLock(Table) Query { return Query{} }

// DeleteProcessed implements [Dialect]. The condition stands there twice, for columns whose own collation
// finds more keys than were chosen; the second time it must not choose the index, hence the plus.
func (SQLite) DeleteProcessed(table Table, params DeleteProcessedParams) Query {
	const (
		sent         = ` AND ("produced" IS NULL OR "dispatched_at" IS NOT NULL)`
		expired      = sqliteConsumer + ` = ? AND "processed_at" >= ? AND "processed_at" < ?` + sent
		stillExpired = `+` + sqliteConsumer + ` = ? AND +"processed_at" < ?` + sent
	)
	from, before := int64(math.MinInt64), ceilMillisecond(params.Before)
	if !params.From.IsZero() {
		from = params.From.UnixMilli()
	}
	return Query{`DELETE FROM ` + table.Quoted() + ` WHERE ("consumer", "message_id") IN (` +
		`SELECT "consumer", "message_id" FROM ` + table.Quoted() + ` WHERE ` + expired + ` ORDER BY "processed_at" LIMIT ?) AND ` + stillExpired +
		` RETURNING "processed_at" * 1000`,
		[]any{params.Consumer, from, before, params.Limit, params.Consumer, before}}
}

// Count implements [Dialect].
func (SQLite) Count(table Table, selection inbox.Selection) Query {
	condition, args := sqliteSelection(selection)
	return Query{`SELECT count(*) FROM ` + table.Quoted() + ` WHERE ` + condition, args}
}

// Find implements [Dialect].
func (SQLite) Find(table Table, selection inbox.Selection, after inbox.Key, limit int) Query {
	condition, args := sqliteSelection(selection)
	return Query{`SELECT "consumer", "message_id", "processed_at" * 1000, CASE WHEN "dispatched_at" IS NULL THEN "produced" END FROM ` +
		table.Quoted() + ` WHERE ` + condition + ` AND (` + sqliteKey + `) > (?, ?) ORDER BY ` + sqliteKey + ` LIMIT ?`,
		append(args, after.Consumer, after.MessageID, limit)}
}

// DeleteRecords implements [Dialect].
func (SQLite) DeleteRecords(table Table, found []inbox.Record) Query {
	chosen, args := sqliteFound(found)
	return Query{chosen + ` DELETE FROM ` + table.Quoted() + ` WHERE ` + sqliteChosen, args}
}

// Statistics implements [Dialect]. SQLite does not tell the size of a table, unless it is built for it.
func (SQLite) Statistics(table Table) Query {
	return Query{Text: `SELECT "consumer", count(*), sum("produced" IS NOT NULL AND "dispatched_at" IS NULL), ` +
		`min("processed_at") * 1000, max("processed_at") * 1000, sum("processed_at" > ` + sqliteNow + ` - 86400000), 0 FROM ` +
		table.Quoted() + ` GROUP BY ` + sqliteConsumer + ` UNION ALL SELECT '', 0, 0, 0, 0, 0, 0 ORDER BY 1 COLLATE BINARY`}
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
