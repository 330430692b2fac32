package inboxtest

import (
	"context"
	"math"
	"slices"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
)

// Consumers implements [inbox.Records].
func (r *MemoryRepository) Consumers(ctx context.Context) (consumers []string, now time.Time, err error) {
	err = r.locked(ctx, func() {
		for key := range r.records {
			consumers = append(consumers, key.Consumer)
		}
	})
	slices.Sort(consumers)
	return slices.Compact(consumers), time.Now(), err
}

// DeleteProcessed implements [inbox.Records]. It is over before another call begins.
func (r *MemoryRepository) DeleteProcessed(ctx context.Context, consumer string, from, before time.Time, limit int) (deleted int, last time.Time, err error) {
	err = r.locked(ctx, func() {
		var expired []inbox.Key
		for key, record := range r.records {
			if record.Produced == nil && record.ProcessedAt.Before(before) && selected(inbox.Selection{Consumer: consumer, From: from}, key, record) {
				expired = append(expired, key)
			}
		}
		slices.SortFunc(expired, func(a, b inbox.Key) int {
			return r.records[a].ProcessedAt.Compare(r.records[b].ProcessedAt)
		})
		for _, key := range expired[:min(max(limit, 0), len(expired))] {
			last = r.records[key].ProcessedAt
			delete(r.records, key)
			deleted++
		}
	})
	return deleted, last, err
}

// CountRecords implements [inbox.Records].
func (r *MemoryRepository) CountRecords(ctx context.Context, selection inbox.Selection) (count int, err error) {
	err = r.locked(ctx, func() {
		for key, record := range r.records {
			if selected(selection, key, record) {
				count++
			}
		}
	})
	return count, err
}

// FindRecords implements [inbox.Records].
func (r *MemoryRepository) FindRecords(ctx context.Context, selection inbox.Selection, after inbox.Key, limit int) (found []inbox.Record, err error) {
	err = r.locked(ctx, func() {
		for key, record := range r.records {
			if selected(selection, key, record) && key.Compare(after) > 0 {
				found = append(found, record)
			}
		}
	})
	slices.SortFunc(found, func(a, b inbox.Record) int { return a.Key.Compare(b.Key) })
	return found[:min(limit, len(found))], err
}

// DeleteRecords implements [inbox.Records].
func (r *MemoryRepository) DeleteRecords(ctx context.Context, found []inbox.Record) (deleted int, err error) {
	err = r.locked(ctx, func() {
		for _, f := range found {
			if record, ok := r.records[f.Key]; ok && record.ProcessedAt.Equal(f.ProcessedAt) {
				delete(r.records, f.Key)
				deleted++
			}
		}
	})
	return deleted, err
}

// Statistics implements [inbox.Records].
func (r *MemoryRepository) Statistics(ctx context.Context, consumers inbox.Consumers) (statistics inbox.Statistics, err error) {
	names, now, err := r.Consumers(ctx)
	if err != nil {
		return inbox.Statistics{}, err
	}
	for _, name := range names {
		if !consumers.Contains(name) {
			continue
		}
		s := inbox.ConsumerStatistics{Consumer: name}
		records, err := r.FindRecords(ctx, inbox.Selection{Consumer: name}, inbox.Key{}, math.MaxInt)
		if err != nil {
			return inbox.Statistics{}, err
		}
		for _, record := range records {
			s.Records++
			if record.Produced != nil {
				s.Unsent++
			}
			if now.Sub(record.ProcessedAt) < 24*time.Hour {
				s.LastDay++
			}
			if s.Oldest.IsZero() || record.ProcessedAt.Before(s.Oldest) {
				s.Oldest = record.ProcessedAt
			}
			if record.ProcessedAt.After(s.Newest) {
				s.Newest = record.ProcessedAt
			}
		}
		statistics.Consumers = append(statistics.Consumers, s)
	}
	return statistics, nil
}

func (r *MemoryRepository) locked(ctx context.Context, do func()) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	r.mutex.Lock()
	defer r.mutex.Unlock()
	do()
	return nil
}

func selected(s inbox.Selection, key inbox.Key, record inbox.Record) bool {
	return (s.Consumer == "" || s.Consumer == key.Consumer) &&
		(s.MessageID == "" || s.MessageID == key.MessageID) &&
		(s.From.IsZero() || !record.ProcessedAt.Before(s.From)) &&
		(s.To.IsZero() || record.ProcessedAt.Before(s.To)) &&
		(s.OlderThan == 0 || time.Since(record.ProcessedAt) > s.OlderThan) &&
		(!s.Unsent || record.Produced != nil)
}
