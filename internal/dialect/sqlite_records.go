package dialect

import (
	"math"
	"strings"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
)

// Consumers implements [Dialect]: it jumps from one consumer to the next in the keys' indexes.
func (SQLite) Consumers(table Table) Query {
	jump := func(cte, name string) string {
		return cte + ` ("consumer") AS (SELECT min(` + sqliteConsumer + `) FROM ` + name + ` UNION ALL ` +
			`SELECT (SELECT min(next.` + sqliteConsumer + `) FROM ` + name + ` AS next WHERE next.` + sqliteConsumer + ` > ` + cte + `."consumer") ` +
			`FROM ` + cte + ` WHERE ` + cte + `."consumer" IS NOT NULL)`
	}
	return Query{Text: `WITH RECURSIVE ` + jump("records", table.Quoted()) + `, ` + jump("stored", table.Unsent().Quoted()) +
		` SELECT "consumer", ` + sqliteNow + ` * 1000 FROM (SELECT "consumer" FROM records UNION SELECT "consumer" FROM stored) WHERE "consumer" IS NOT NULL ` +
		`UNION ALL SELECT '', ` + sqliteNow + ` * 1000 ORDER BY 1 COLLATE BINARY`}
}

// CleanerLock implements [Dialect]: there is one writer anyway.
func (SQLite) CleanerLock(Table) Query { return Query{} }

// DeleteProcessed implements [Dialect]. The condition stands there twice, for columns whose own collation
// finds more keys than were chosen; the second time it must not choose the index, hence the plus.
func (SQLite) DeleteProcessed(table Table, params inbox.DeleteProcessedParams) Query {
	const (
		expired      = sqliteConsumer + ` = ? AND "processed_at" >= ? AND "processed_at" < ?`
		stillExpired = `+` + sqliteConsumer + ` = ? AND +"processed_at" < ?`
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

// Undeleted implements [Dialect]: Check refuses triggers, and nothing else keeps a record.
func (SQLite) Undeleted(Table, inbox.DeleteProcessedParams) Query { return Query{} }

// Count implements [Dialect].
func (SQLite) Count(table Table, selection inbox.Selection) Query {
	name, alias, at := sqliteTable(table, selection)
	condition, args := sqliteSelection(selection, alias, at)
	return Query{`SELECT count(*) FROM ` + name + ` AS ` + alias + ` WHERE ` + condition, args}
}

// Find implements [Dialect].
func (SQLite) Find(table Table, selection inbox.Selection, after inbox.Record, limit int) Query {
	if selection.Unsent {
		condition, args := sqliteUnsentPage(selection, after, limit)
		return Query{`SELECT ` + sqliteUnsent + ` FROM ` + table.Unsent().Quoted() + ` AS unsent WHERE ` + condition, args}
	}
	_, alias, at := sqliteTable(table, selection)
	condition, args := sqliteSelection(selection, alias, at)
	const key = `record."consumer" COLLATE BINARY, record."message_id" COLLATE BINARY`
	return Query{`SELECT record."consumer", record."message_id", record."processed_at" * 1000, coalesce(unsent."topic", ''), unsent."produced" FROM ` +
		sqliteRecords(table) + ` WHERE ` + condition + ` AND (` + key + `) > (?, ?) ORDER BY ` + key + ` LIMIT ?`,
		append(args, after.Key.Consumer, after.Key.MessageID, limit)}
}

const sqliteUnsent = `"consumer", "message_id", "claimed_at" * 1000, "topic", "produced"`

// sqliteUnsentPage is the condition of a page of unsent messages, with its order and limit.
func sqliteUnsentPage(selection inbox.Selection, after inbox.Record, limit int) (condition string, args []any) {
	condition, args = sqliteSelection(selection, "unsent", "stored_at")
	const key = `unsent."consumer" COLLATE BINARY, unsent."message_id" COLLATE BINARY, unsent."claimed_at"`
	claimedAt := int64(math.MinInt64)
	if !after.ProcessedAt.IsZero() {
		claimedAt = after.ProcessedAt.UnixMilli()
	}
	return condition + ` AND (` + key + `) > (?, ?, ?) ORDER BY ` + key + ` LIMIT ?`,
		append(args, after.Key.Consumer, after.Key.MessageID, claimedAt, limit)
}

// LeaseUnsent implements [Dialect].
func (SQLite) LeaseUnsent(table Table, selection inbox.Selection, after inbox.Record, limit int, lease time.Duration) Query {
	condition, args := sqliteUnsentPage(selection, after, limit)
	return Query{`UPDATE ` + table.Unsent().Quoted() + ` SET "leased_until" = ` + sqliteNow + ` + ? WHERE rowid IN (SELECT rowid FROM ` +
		table.Unsent().Quoted() + ` AS unsent WHERE (unsent."leased_until" IS NULL OR unsent."leased_until" <= ` + sqliteNow + `) AND ` + condition +
		`) RETURNING ` + sqliteUnsent,
		append([]any{lease.Milliseconds()}, args...)}
}

// DeleteRecords implements [Dialect].
func (SQLite) DeleteRecords(table Table, found []inbox.Record) Query {
	chosen, args := sqliteFound(found)
	return Query{chosen + ` DELETE FROM ` + table.Quoted() + ` WHERE ` + sqliteChosen + `"processed_at"` + sqliteEnd, args}
}

// DeleteUnsent implements [Dialect].
func (SQLite) DeleteUnsent(table Table, found []inbox.Record) Query {
	chosen, args := sqliteFound(found)
	return Query{chosen + ` DELETE FROM ` + table.Unsent().Quoted() + ` WHERE ` + sqliteChosen + `"claimed_at"` + sqliteEnd, args}
}

// Statistics implements [Dialect]. SQLite does not tell the size of a table, unless it is built for it.
func (SQLite) Statistics(table Table) Query {
	return Query{Text: `SELECT "consumer", sum("records"), sum("unsent"), coalesce(min("oldest"), 0), coalesce(max("newest"), 0), sum("last_day"), 0 FROM (` +
		`SELECT "consumer", count(*) AS "records", 0 AS "unsent", min("processed_at") * 1000 AS "oldest", max("processed_at") * 1000 AS "newest", ` +
		`sum("processed_at" > ` + sqliteNow + ` - 86400000) AS "last_day" FROM ` + table.Quoted() + ` GROUP BY ` + sqliteConsumer + ` UNION ALL ` +
		`SELECT "consumer", 0, count(*), NULL, NULL, 0 FROM ` + table.Unsent().Quoted() + ` GROUP BY ` + sqliteConsumer +
		`) GROUP BY ` + sqliteConsumer + ` UNION ALL SELECT '', 0, 0, 0, 0, 0, 0 ORDER BY 1 COLLATE BINARY`}
}

// sqliteTable is what a selection is about.
func sqliteTable(table Table, s inbox.Selection) (name, alias, at string) {
	if s.Unsent {
		return table.Unsent().Quoted(), "unsent", "stored_at"
	}
	return table.Quoted(), "record", "processed_at"
}

// sqliteSelection is a condition; true when all is selected.
func sqliteSelection(s inbox.Selection, alias, at string) (condition string, args []any) {
	conditions := []string{`true`}
	at = alias + `."` + at + `"`
	add := func(condition string, arg any) {
		conditions, args = append(conditions, condition), append(args, arg)
	}
	if s.Consumer != "" {
		add(alias+`.`+sqliteConsumer+` = ?`, s.Consumer)
	}
	if s.MessageID != "" {
		add(alias+`.`+sqliteMessageID+` = ?`, s.MessageID)
	}
	if !s.From.IsZero() {
		add(at+` >= ?`, ceilMillisecond(s.From))
	}
	if !s.To.IsZero() {
		add(at+` < ?`, ceilMillisecond(s.To))
	}
	if s.OlderThan != 0 {
		add(at+` < `+sqliteNow+` - ?`, s.OlderThan.Milliseconds())
	}
	if s.NotOlderThan != 0 {
		add(at+` >= `+sqliteNow+` - ?`, s.NotOlderThan.Milliseconds())
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
